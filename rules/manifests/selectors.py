"""Selectors by labels, as policies write them, and what the API itself demands of them."""

from rules.manifests.fields import Fields, as_text
from rules.manifests.metadata import is_subdomain
from rules.policies import Operator, Requirement, Selector

SELECTOR_KEYS = ("matchLabels", "matchExpressions")
EXPRESSION_KEYS = ("key", "operator", "values")
OPERATORS = {one.value: one for one in Operator}
_LISTS = (Operator.IN, Operator.NOT_IN)
_LONGEST = 63
_ALPHANUMERIC = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789")
_LETTERS = _ALPHANUMERIC | frozenset("-_.")
_LABEL_FIX = (
    f"Use at most {_LONGEST} letters, digits, dashes, underscores and dots, "
    "with a letter or digit at both ends."
)
_KEY_FIX = _LABEL_FIX.removesuffix(".") + "; in front there may be a domain and a slash."


def read_selector(holder: Fields, key: str) -> Selector:
    """The selector at a key; one that is not there, or is empty, selects everything."""
    fields = holder.mapping(key)
    fields.only(SELECTOR_KEYS)
    found = _labels(fields.mapping("matchLabels"))
    found += [_expression(one) for one in fields.mappings("matchExpressions")]
    return Selector(
        tuple(
            sorted(
                {one for one in found if one},
                key=lambda one: (one.key, one.operator.value, one.values),
            )
        )
    )


def _labels(fields: Fields) -> list[Requirement | None]:
    found: list[Requirement | None] = []
    for key, value in fields.values.items():
        name = key if isinstance(key, str) else ""
        if not is_label_key(name):
            at = (str(key),)
            fields.problem("bad-label", "cannot be the key of a label", _KEY_FIX, at=at, value=key)
        text = _value(fields, (str(key),), value)
        if name and text is not None:
            found.append(Requirement(name, Operator.IN, (text,)))
    return found


def _value(fields: Fields, at: tuple[str | int, ...], value: object) -> str | None:
    text = as_text(value)
    if text is None:
        fields.problem("not-a-string", "must be a string", "Put it in quotes.", at=at, value=value)
    elif text and not _is_word(text):
        fields.problem("bad-label", "cannot be the value of a label", _LABEL_FIX, at=at, value=text)
    return text


def _expression(fields: Fields) -> Requirement | None:
    fields.only(EXPRESSION_KEYS)
    key = fields.string("key", required=True)
    if key is not None and not is_label_key(key):
        what = "cannot be the key of a label"
        fields.problem("bad-label", what, _KEY_FIX, at=("key",), value=key)
    operator = _operator(fields)
    read = [_value(fields, ("values", at), v) for at, v in enumerate(fields.sequence("values"))]
    values = [text for text in read if text is not None]
    if operator is None or not _takes(fields, operator) or not key:
        return None
    return (
        Requirement(key, operator, tuple(sorted(set(values)))) if len(values) == len(read) else None
    )


def _operator(fields: Fields) -> Operator | None:
    text = fields.string("operator", required=True)
    if text is not None and text not in OPERATORS:
        words = ", ".join(OPERATORS)
        close = next((word for word in OPERATORS if word.casefold() == text.casefold()), "")
        fields.problem(
            "bad-choice",
            "is not a way to compare a label",
            f"Write {close}." if close else f"Write one of {words}.",
            at=("operator",),
            value=text,
        )
    return OPERATORS.get(text or "")


def _takes(fields: Fields, operator: Operator) -> bool:
    """Whether there are values just where the operator needs some."""
    given = fields.values.get("values")
    if operator in _LISTS and (given is None or given == []):
        fields.problem(
            "values-needed",
            f"must be there with {operator.value}",
            "Add values: with a list of those to compare with, or write Exists or DoesNotExist.",
            at=("values",),
        )
        return False
    if operator not in _LISTS and given:
        fields.problem(
            "values-forbidden",
            f"must not be there with {operator.value}, which compares with nothing",
            "Remove it, or write In or NotIn.",
            at=("values",),
            value=given,
        )
        return False
    return isinstance(given, list | None)


def is_label_key(text: str) -> bool:
    """Whether it is a key as Kubernetes wants them: a word, perhaps behind a domain and a slash."""
    domain, slash, name = text.rpartition("/")
    return _is_word(name) and (is_subdomain(domain) if slash else True)


def _is_word(text: str) -> bool:
    return (
        0 < len(text) <= _LONGEST
        and _LETTERS.issuperset(text)
        and text[0] in _ALPHANUMERIC
        and text[-1] in _ALPHANUMERIC
    )
