"""What `cuadrilla doctor --json` prints, as a JSON schema (2020-12); `docs/doctor.schema.json` is a copy of it."""

from typing import Any, get_args

from cuadrilla.doctor.diagnosis import Level, Shell

VERSION = 1
TEXT: dict[str, Any] = {"type": "string"}
COUNT: dict[str, Any] = {"type": "integer", "minimum": 0}
FINDING: dict[str, Any] = {
    "type": "object",
    "required": ["check", "level", "cause", "remedy", "command", "shell", "fixable", "template", "fields"],
    "additionalProperties": False,
    "properties": {
        "check": {**TEXT, "pattern": r"^[a-z]+\.[a-z_]+$", "description": "family and check; names stay"},
        "level": {"enum": list(get_args(Level))},
        "cause": {**TEXT, "description": "in English"},
        "remedy": {**TEXT, "description": "what no command does; may be empty"},
        "command": {**TEXT, "description": "to be typed as it stands; may be empty"},
        "shell": {"enum": list(get_args(Shell)), "description": "where to type it"},
        "fixable": {"type": "boolean", "description": "--fix offers to type it"},
        "template": {**TEXT, "description": "of the cause: the same on every machine"},
        "fields": {"type": "object", "additionalProperties": {"type": ["string", "number", "null"]}},
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
