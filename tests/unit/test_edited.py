"""Manifests in their own text: what stays as it was written, and what must be written anew."""

from __future__ import annotations

import json
import textwrap

import pytest

from agent.sources import yaml_text
from agent.sources.edited import edited, together
from agent.sources.written import block, json_of, scalar
from rules.convert import ANNOTATIONS, PORTS, RANGES, convert
from rules.problems import OddNumeral


def converted(text: str, to: str) -> str:
    return edited(textwrap.dedent(text), lambda document: convert(document, to))


ANNOTATED = """\
    # Telephones.
    apiVersion: v1
    kind: Service
    metadata:
      name: phone   # as in DNS
      annotations:
        # what the API has no field for
        portrange.alpha.kubernetes.io/port-end-sip: "5061"
      labels: {a: b}   # flow style is left alone
    spec:
      ports:
      # the web
      - name: http
        port: 80

      - name: 'sip'  # signalling
        # well known
        port: 5060  # to 5061
        targetPort: 7060
        protocol: TCP
      # the end of the ports
      selector:
        app: "phone"   # quoted
"""
SINGLE = """\
    # Telephones.
    apiVersion: v1
    kind: Service
    metadata:
      name: phone   # as in DNS
      labels: {a: b}   # flow style is left alone
    spec:
      ports:
      # the web
      - name: http
        port: 80

      - name: 'sip0'  # signalling
        # well known
        port: 5060  # to 5061
        targetPort: 7060
        protocol: TCP
      - name: 'sip1'
        port: 5061
        targetPort: 7061
        protocol: TCP
      # the end of the ports
      selector:
        app: "phone"   # quoted
"""
BACK = """\
    # Telephones.
    apiVersion: v1
    kind: Service
    metadata:
      name: phone   # as in DNS
      labels: {a: b}   # flow style is left alone
      annotations:
        portrange.alpha.kubernetes.io/port-end-sip: "5061"
    spec:
      ports:
      # the web
      - name: http
        port: 80

      - name: 'sip'  # signalling
        # well known
        port: 5060  # to 5061
        targetPort: 7060
        protocol: TCP
      # the end of the ports
      selector:
        app: "phone"   # quoted
"""


def test_comments_blank_lines_quotes_and_order_stay() -> None:
    assert converted(ANNOTATED, PORTS) == textwrap.dedent(SINGLE)
    assert converted(SINGLE, ANNOTATIONS) == textwrap.dedent(BACK)


def test_line_endings_stay() -> None:
    text = textwrap.dedent(ANNOTATED).replace("\n", "\r\n")
    made = edited(text, lambda document: convert(document, PORTS))
    assert made == textwrap.dedent(SINGLE).replace("\n", "\r\n")


@pytest.mark.parametrize("to", [ANNOTATIONS, RANGES])
def test_what_is_spelt_so_already_stays_to_the_letter(to: str) -> None:
    assert converted(ANNOTATED, to) == textwrap.dedent(ANNOTATED)


def test_comments_on_their_own_lines_outlive_the_items_between_them() -> None:
    text = """\
        apiVersion: v1
        kind: Pod
        metadata: {name: p}
        spec:
          containers:
            - ports:
                # one
                - name: a0
                  containerPort: 1
                # two

                - name: a1
                  containerPort: 2
                # three
                - name: b
                  containerPort: 9
    """
    assert converted(text, ANNOTATIONS) == textwrap.dedent("""\
        apiVersion: v1
        kind: Pod
        metadata:
          name: p
          annotations:
            portrange.alpha.kubernetes.io/port-end-a: "2"
        spec:
          containers:
            - ports:
                # one
                - name: a
                  containerPort: 1
                # two
                # three
                - name: b
                  containerPort: 9
        """)


def test_items_in_braces_stay_in_braces() -> None:
    text = """\
        apiVersion: v1
        kind: Service
        metadata: {annotations: {portrange.alpha.kubernetes.io/port-end-a: '2'}, name: s}
        spec:
          ports:
          - {name: a, port: 1} # first
          - {name: b, port: 9}
    """
    assert converted(text, PORTS) == textwrap.dedent("""\
        apiVersion: v1
        kind: Service
        metadata:
          name: s
        spec:
          ports:
          - {name: a0, port: 1} # first
          - {name: a1, port: 2}
          - {name: b, port: 9}
        """)


def test_a_list_in_brackets_is_written_anew_and_the_rest_stays() -> None:
    text = """\
        kind: Service   # S
        apiVersion: v1
        metadata:
          annotations: {portrange.alpha.kubernetes.io/port-end-a: '2'}
          name: s  # N
        spec:
          ports: [{name: a, port: 1}]
          externalIPs: ['192.0.2.1']  # E
    """
    assert converted(text, PORTS) == textwrap.dedent("""\
        kind: Service   # S
        apiVersion: v1
        metadata:
          name: s  # N
        spec:
          ports:
            - name: a0
              port: 1
            - name: a1
              port: 2
          externalIPs: ['192.0.2.1']  # E
        """)


def test_a_document_in_braces_is_written_anew_in_blocks_and_its_head_stays() -> None:
    text = """\
        # A comment of the whole.
        ---
        # Another.
        {apiVersion: v1, kind: Service, metadata: {name: s},
         spec: {ports: [{name: a0, port: 1}, {name: a1, port: 2}]}}
        --- {kind: Secret}
        ---  # beside the marker
        kind: Secret
    """
    assert converted(text, ANNOTATIONS) == textwrap.dedent("""\
        # A comment of the whole.
        ---
        # Another.
        apiVersion: v1
        kind: Service
        metadata:
          name: s
          annotations:
            portrange.alpha.kubernetes.io/port-end-a: "2"
        spec:
          ports:
            - name: a
              port: 1
        --- {kind: Secret}
        ---  # beside the marker
        kind: Secret
        """)


def test_a_document_beside_its_marker_is_written_anew_below_it() -> None:
    ports = "[{name: a0, port: 1}, {name: a1, port: 2}]"
    text = f"a: b\n--- {{apiVersion: v1, kind: Service, spec: {{ports: {ports}}}}}\n"
    made = converted(text, ANNOTATIONS)
    assert made.startswith("a: b\n---\napiVersion: v1\n")
    assert len(yaml_text.parse(made)[0]) == 2


ALIASED = """\
    apiVersion: v1
    kind: Pod
    metadata:
      annotations:
        portrange.alpha.kubernetes.io/port-end-a: "2"
        else: &else x  # kept if the lines are
    spec:
      containers:
      - ports: %s
        env: *else
"""


def test_anchors_stay_where_they_are_in_nobody_s_way() -> None:
    ports = "\n      - name: a\n        containerPort: 1"
    made = converted(ALIASED % textwrap.indent(ports, "    "), PORTS)
    assert "else: &else x  # kept if the lines are" in made
    assert "env: *else" in made
    assert "name: a1" in made


def test_aliases_in_the_way_are_written_out() -> None:
    text = (ALIASED % "*ports").replace(
        "    spec:", "      ports: &ports\n      - name: a\n        containerPort: 1\n    spec:"
    )
    before = yaml_text.parse(textwrap.dedent(text))
    made = converted(text, PORTS)
    assert before[1] == []
    [(value, _)], problems = yaml_text.parse(made)
    assert problems == []
    assert value == convert(before[0][0][0], PORTS)
    assert "&ports" in made  # what was meant by it is still there


def test_an_anchor_that_would_be_lost_makes_the_document_anew() -> None:
    text = """\
        apiVersion: v1
        kind: Service
        metadata:
          annotations:
            portrange.alpha.kubernetes.io/port-end-a: &end "2"
            else: *end
        spec:
          ports: [{name: a, port: 1}]
    """
    made = converted(text, PORTS)
    assert "&end" not in made
    assert 'else: "2"' in made


def test_a_file_with_directives_is_written_anew_as_a_whole() -> None:
    text = "%YAML 1.1\n---\n" + textwrap.dedent(ANNOTATED) + "...\n%YAML 1.1\n---\na: 017\n"
    made = edited(text, lambda document: convert(document, PORTS))
    assert [value for value, _ in yaml_text.parse(made)[0]] == [
        convert(value, PORTS) for value, _ in yaml_text.parse(text)[0]
    ]
    assert made.endswith("---\na: 017\n")


MACHINE = """\
    apiVersion: kubevirt.io/v1
    kind: VirtualMachine
    metadata:
      name: vm
    spec:
      template:  # the guest
        spec:
          domain:
            devices:
              interfaces:
              - name: red
                masquerade: {}
                ports:
                # of the signalling
                - port: 5060   # SIP
                  end: 5061
                - name: web
                  port: 80
                model: virtio
          networks:
          - name: red
            pod: {}
"""


def test_a_machine_s_new_annotations_stand_in_its_template() -> None:
    assert converted(MACHINE, ANNOTATIONS) == textwrap.dedent("""\
        apiVersion: kubevirt.io/v1
        kind: VirtualMachine
        metadata:
          name: vm
        spec:
          template:  # the guest
            metadata:
              annotations:
                portrange.alpha.kubernetes.io/port-end-tcp: "5061"
            spec:
              domain:
                devices:
                  interfaces:
                  - name: red
                    masquerade: {}
                    ports:
                    # of the signalling
                    - name: tcp
                      port: 5060   # SIP
                      protocol: TCP
                    - name: web
                      port: 80
                    model: virtio
              networks:
              - name: red
                pod: {}
        """)


def test_another_key_stands_where_the_old_one_stood() -> None:
    made = converted(MACHINE, RANGES).splitlines()
    before, after = (
        next(at for at, line in enumerate(made) if key in line) for key in ("masquerade", "model")
    )
    assert textwrap.dedent("\n".join(made[before : after + 1])) == textwrap.dedent("""\
        masquerade: {}
        portRanges:
        - start: 80
          end: 80
          protocol: TCP
        - start: 5060
          end: 5061
          protocol: TCP
        model: virtio""")


# ------------------------------------------------------------------------------------------- JSON


@pytest.mark.parametrize("indent", [None, 1, 4])
def test_json_stays_json_with_its_indent(indent: int | None) -> None:
    document = {
        "kind": "Service",
        "apiVersion": "v1",
        "spec": {"ports": [{"name": "ä0", "port": 1}], "x": [], "y": 1.5, "z": [None, True]},
    }
    text = json.dumps(document, indent=indent, ensure_ascii=False)
    renamed = json.loads(text.replace("ä0", "a"))
    made = edited(text, lambda _: renamed)
    assert made == json.dumps(renamed, indent=indent, ensure_ascii=False) + "\n"


def test_json_that_stays_the_same_stays_to_the_letter() -> None:
    text = '{"kind":"Secret",\t"n": 1e3}'
    assert edited(text, lambda document: convert(document, PORTS)) == text


def test_numbers_beyond_python_s_patience_stay_as_they_are() -> None:
    digits = "9" * 5000
    text = f'{{"a": {digits}, "b": 1e999, "c": -1e999}}'
    made = edited(text, lambda document: {**document, "d": 1})  # type: ignore[dict-item]
    assert made == f'{{"a": {digits}, "b": 1e999, "c": -1e999, "d": 1}}\n'


def test_half_a_surrogate_pair_can_be_written() -> None:
    assert json_of({"a": "\ud800"}, None) == '{"a": "\\ud800"}'
    assert json.loads(json_of("\u2028\U0001f600", None)) == "\u2028\U0001f600"


# --------------------------------------------------------------------------------------- together


def test_several_texts_become_the_documents_of_one() -> None:
    texts = ["a: 1", "---\nb: 2\n", '{"c": "\\t"}', "%YAML 1.1\n---\nd: 4\n"]
    assert together(texts) == 'a: 1\n---\nb: 2\n---\nc: "\\t"\n...\n%YAML 1.1\n---\nd: 4\n'
    values = [value for value, _ in yaml_text.parse(together(texts))[0]]
    assert values == [{"a": 1}, {"b": 2}, {"c": "\t"}, {"d": 4}]
    assert together(['{"c": 3}']) == '{"c": 3}'


# ---------------------------------------------------------------------------------------- scalars


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain", "plain"),
        ("two words", "two words"),
        ("10.0.2.0/24", '"10.0.2.0/24"'),
        ("yes", '"yes"'),
        ("y", '"y"'),
        ("", '""'),
        ('a"\\\n\x07\U000e0001', '"a\\"\\\\\\n\\u0007\\U000e0001"'),
        (OddNumeral("0x10"), "0x10"),
        (None, "null"),
        (True, "true"),
        (False, "false"),
        (7, "7"),
        (float("nan"), ".nan"),
        (float("-inf"), "-.inf"),
        ({}, "{}"),
        ([], "[]"),
    ],
)
def test_scalars_are_written_so_that_every_reader_finds_the_same(value: object, text: str) -> None:
    assert scalar(value) == text


def test_texts_of_several_lines_are_written_as_such() -> None:
    assert block({"a": "x\n  y\n\nz\n", "b": ["x\ny"]}, 0) == [
        "a: |",
        "  x",
        "    y",
        "",
        "  z",
        "b:",
        "  - |-",
        "      x",
        "      y",
    ]
    assert block({"a": " x\ny"}, 0) == ['a: " x\\ny"']


def test_an_item_in_braces_that_holds_more_is_written_anew_in_blocks() -> None:
    text = """\
        apiVersion: v1
        kind: Pod
        metadata:
          annotations: {portrange.alpha.kubernetes.io/port-end-a: '2', x: y}  # both
        spec:
          containers:
          - {name: c, ports: [{name: a, containerPort: 1}]}
          - {name: d} # stays
    """
    assert converted(text, PORTS) == textwrap.dedent("""\
        apiVersion: v1
        kind: Pod
        metadata:
          annotations:
            x: "y"
        spec:
          containers:
          - name: c
            ports:
            - name: a0
              containerPort: 1
            - name: a1
              containerPort: 2
          - {name: d} # stays
        """)
