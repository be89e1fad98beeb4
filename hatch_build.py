"""What is made when a wheel is built or an editable one is installed: the translations, compiled."""

from pathlib import Path
from typing import Any

from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po
from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Translations(BuildHookInterface[Any]):
    def initialize(self, _version: str, _build_data: dict[str, Any]) -> None:
        for source in Path(self.root).glob("src/cuadrilla/locale/*/LC_MESSAGES/*.po"):
            with source.open("rb") as texts, source.with_suffix(".mo").open("wb") as compiled:
                write_mo(compiled, read_po(texts))
