"""TEI-XML: what is text, and what is refused."""

import io

import pytest

from cuadrilla.data.formats import tei
from cuadrilla.errors import DataError

NOVEL = """<?xml version="1.0" encoding="UTF-8"?>
<?xml-model href="https://example.org/eltec.rng" type="application/xml"?>
<TEI xmlns="http://www.tei-c.org/ns/1.0" xml:lang="es">
  <teiHeader><fileDesc>
    <titleStmt><title>Una novela</title></titleStmt>
  </fileDesc></teiHeader>
  <text>
    <front><div type="titlepage"><p>PORTADA</p></div></front>
    <body>
      <div type="chapter">
        <head>Capítulo <hi rend="it">I</hi></head>
        <p>Érase una ma<hi>ñ</hi>ana&#x20;de <emph>abril</emph><note n="1">una nota <p>larga</p></note>,
           y   llovía &amp; tronaba.<!-- nada --> Llegó el <choice><sic>cavallo</sic><corr>caballo</corr></choice>.</p>
        <pb n="12"/><p>El doc<lb break="no"/>tor <sic>dijo</sic>:<lb/>—Nada.</p>
        <lg><l>Verde que te</l><l>quiero verde</l></lg>
        <floatingText><front><p>fuera</p></front><body><p>Una carta.</p></body></floatingText>
      </div>
    </body>
    <back><p>ÍNDICE</p></back>
  </text>
</TEI>
"""
EXPECTED = (
    "Capítulo I\n\nÉrase una mañana de abril, y llovía & tronaba. Llegó el caballo.\n\n"
    "El doctor dijo:\n—Nada.\n\nVerde que te\nquiero verde\n\nUna carta."
)


def read(document, step=2**20):
    data = document.encode() if isinstance(document, str) else document
    found = tei.read(io.BufferedReader(io.BytesIO(data), step), where="a.xml")  # type: ignore[arg-type]
    return found and found[1]


def body(content):
    return f"<TEI><text><body>{content}</body></text></TEI>"


@pytest.mark.parametrize("step", [1, 7, 2**20])
def test_the_text_of_a_novel_is_its_body(step):
    assert read(NOVEL, step) == [EXPECTED]


def test_each_body_of_a_corpus_is_a_text():
    one, two = body("<p>uno</p>"), body("<p>dos</p><p>tres</p>")
    assert read(f"<teiCorpus><teiHeader/>{one}{body('')}{two}</teiCorpus>") == ["uno", "dos\n\ntres"]
    group = "<group><text><body><p>a</p></body></text><text><body><p>b</p></body></text></group>"
    assert read(f"<tei:TEI xmlns:tei='http://www.tei-c.org/ns/1.0'><text>{group}</text></tei:TEI>") == ["a", "b"]


def test_plays_lists_and_tables_are_set_apart():
    sp = "<sp><speaker>DON JUAN</speaker><l>¿No es verdad</l><l>ángel de amor?</l></sp>"
    rows = "<table><row><cell>a</cell><cell>b</cell></row><row><cell>c</cell></row></table>"
    assert read(body(f"{sp}<list><item>x</item><item>y</item></list>{rows}")) == [
        "DON JUAN\n¿No es verdad\nángel de amor?\n\nx\ny\n\na b\nc"
    ]


def test_a_quote_inside_a_paragraph_is_a_part_of_it():
    inside = "<p>Dijo: <quote>No hay <quote>mal</quote> que dure</quote>, y calló.</p>"
    verses = "<p>Cantó <quote><l>uno</l><l>dos</l></quote> y calló.</p>"
    apart = "<quote>Solo.</quote>"
    assert read(body(f"{inside}{apart}{verses}")) == [
        "Dijo: No hay mal que dure, y calló.\n\nSolo.\n\nCantó\nuno\ndos\ny calló."
    ]


@pytest.mark.parametrize("step", [1, 2**20])
def test_references_inside_the_file_are_marks_of_notes_and_go(step):
    marks = "<p>una <hi>avalanche</hi> {}, ni{} Juan {}</p>".format(
        *(f"<ref target='#n{number}'>{mark}</ref>" for number, mark in enumerate(("[1]", "2", "*")))
    )
    others = "<p>el <ref target='#c4'>capítulo cuarto</ref>, <ref target='x.xml'>[7]</ref>.</p>"
    assert read(body(marks + others), step) == ["una avalanche, ni Juan\n\nel, [7]."]


@pytest.mark.parametrize("encoding", ["iso-8859-1", "windows-1252", "utf-16", "cp850"])
def test_the_declared_encoding_is_used(encoding):
    document = f"<?xml version='1.0' encoding='{encoding}'?>{body('<p>año</p>')}"
    assert read(document.encode(encoding)) == ["año"]


def test_named_characters_of_an_external_dtd_are_known_and_it_is_not_opened(tmp_path):
    dtd = tmp_path / "a.dtd"
    dtd.write_text("<!ENTITY ntilde 'FALSE'><!ENTITY mia 'FALSE'>")
    doctype = f"<!DOCTYPE TEI.2 SYSTEM '{dtd.as_uri()}'>"
    assert read(doctype + "<TEI.2><text><body><p>a&ntilde;o</p></body></text></TEI.2>") == ["año"]
    assert read(doctype + body("&mia;")) == ["&mia;"]
    with pytest.raises(DataError, match="not well-formed"):
        read(body("&ntilde;"))


LAUGHS = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 10))


@pytest.mark.parametrize("own", [f'<!ENTITY l0 "ja">{LAUGHS}', '<!ENTITY l9 SYSTEM "file:///etc/passwd">'])
def test_entities_are_not_expanded(own):
    try:
        assert read(f"<!DOCTYPE TEI [{own}]>" + body("&l9;")) == ["&l9;"]
    except DataError:
        assert "l0" in own


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ("<TEI>" + "<p>" * 257, "Excessive depth"),
        (body("x" * 11_000_000), "Text node too long"),
        (body("<p>"), "tag mismatch"),
        ("<TEI>", "Premature end"),
        ("", "no element found"),
        ("<?xml version='1.0' encoding='nada'?>" + body("x"), "Unsupported encoding"),
        (b"<TEI>\xf1</TEI>", "Invalid bytes"),
        ("hola", "a.xml:1: not well-formed XML"),
    ],
)
def test_what_is_not_well_formed_or_would_grow_is_refused(document, said):
    with pytest.raises(DataError) as caught:
        read(document)
    assert said in caught.value.message
    assert caught.value.hint
