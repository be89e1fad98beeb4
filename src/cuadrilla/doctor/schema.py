"""What `cuadrilla doctor --json` prints, as a JSON schema (2020-12); `docs/doctor.schema.json` is a copy of it."""

from typing import Any, get_args

from cuadrilla.doctor.diagnosis import Level, Shell
from cuadrilla.messages import LANGUAGES

VERSION = 1
TEXT: dict[str, Any] = {"type": "string"}
COUNT: dict[str, Any] = {"type": "integer", "minimum": 0}
TEXTS: dict[str, Any] = {
    "cause": TEXT,
    "remedy": {**TEXT, "description": "what no command does; may be empty"},
    "place": {**TEXT, "description": "where to type the command, in words; empty without one"},
}
TRANSLATION: dict[str, Any] = {
    "type": "object",
    "required": list(TEXTS),
    "additionalProperties": False,
    "properties": TEXTS,
}
FINDING: dict[str, Any] = {
    "type": "object",
    "required": [
        "check",
        "level",
        *TEXTS,
        "command",
        "shell",
        "fixable",
        "template",
        "fields",
        "translations",
    ],
    "additionalProperties": False,
    "properties": {
        "check": {**TEXT, "pattern": r"^[a-z]+\.[a-z_]+$", "description": "family and check; names stay"},
        "level": {"enum": list(get_args(Level))},
        **TEXTS,
        "command": {**TEXT, "description": "to be typed as it stands; may be empty"},
        "shell": {"enum": list(get_args(Shell)), "description": "where to type it"},
        "fixable": {"type": "boolean", "description": "--fix offers to type it"},
        "template": {**TEXT, "description": "of the cause: the same on every machine"},
        "fields": {"type": "object", "additionalProperties": {"type": ["string", "number", "null"]}},
        "translations": {
            "type": "object",
            "description": "the texts above, which are English, by language",
            "required": list(LANGUAGES[1:]),
            "additionalProperties": TRANSLATION,
        },
    },
}
SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "cuadrilla doctor --json",
    "type": "object",
    "required": ["schema", "cuadrilla", "failures", "warnings", "findings"],
    "additionalProperties": False,
    "properties": {
        "schema": {"const": VERSION},
        "cuadrilla": TEXT,
        "failures": COUNT,
        "warnings": COUNT,
        "findings": {"type": "array", "items": FINDING},
    },
}
