"""Where manifests come from: text becomes plain values that know their lines, and files become a
complete snapshot. `CODES` are those of what is wrong before a manifest is even read."""

CODES = {
    "duplicate-machine": "one kind, namespace and name written in two places",
    "duplicate-policy": "one NetworkPolicy written in two places",
    "duplicate-service": "one Service written in two places",
    "internal-error": "a bug in portranger that one object or file meets",
    "json-duplicate-key": "a key that is twice in one JSON object",
    "not-text": "a file that is not UTF-8 text",
    "too-large": "a file beyond the size that is read",
    "unreadable": "a path that is not there, or cannot be read",
    "yaml-alias": "an alias without its anchor, or inside it",
    "yaml-duplicate-key": "a key that is twice in one YAML mapping",
    "yaml-key": "a key that is not a string",
    "yaml-merge": "a merge key whose value is neither a mapping nor a list of them",
    "yaml-syntax": "text that is not YAML",
    "yaml-tag": "a tag that would turn a value into something else",
    "yaml-too-deep": "mappings and lists nested beyond the limit",
    "yaml-too-large": "more values than the limit, aliases counted each time",
}
