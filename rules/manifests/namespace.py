"""A Namespace becomes the labels that policies choose it by. Where these cannot be read, it is said
to have nobody knows which, so that no policy opens because it seems to lack one."""

from rules.manifests import metadata
from rules.manifests.fields import Fields
from rules.policies import Namespace


def read_namespace(document: Fields) -> Namespace | None:
    """The Namespace of a manifest; None where its name is not known."""
    own_metadata = document.mapping("metadata")
    name = own_metadata.string("name", required=True)
    if name is not None and not metadata.is_label(name):
        own_metadata.problem(
            "bad-name",
            "is not a valid namespace",
            "Use at most 63 lower-case letters, digits and dashes, no dash at either end.",
            at=("name",),
            value=name,
        )
        return None
    labels = metadata.labels(own_metadata.mapping("labels"))
    if name is None:
        return None
    return Namespace(name=name, labels=None if document.found else labels)
