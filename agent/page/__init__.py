"""The daemon's own page, for a person with a browser: a Status becomes HTML, here and nowhere else.

Pure, but for reading the two files that lie beside it. Whatever tenants or processes named is text
to `markup`, which no caller can get around; the numbers of rows, ranges and letters are bounded, so
that a thousand namespaces make a page that is still quick.
"""
