"""A kind of import contract, for `lint-imports` (`pyproject.toml`): a list of what is allowed.

import-linter's own kinds list what is forbidden, so a module that is new is allowed to everybody.
"""

from __future__ import annotations

from typing import Any

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class AllowedContract(Contract):
    """Some modules may directly import of some packages only what is listed.

    A module stands for those below it, too.

    Fields:
        importers: who is bound.
        exempt: modules among them that are not bound.
        packages: of what the list is.
        allowed: modules of these packages.
    """

    type_name = "allowed"

    importers = fields.ListField(subfield=fields.StringField())
    exempt = fields.ListField(subfield=fields.StringField(), required=False, default=[])
    packages = fields.ListField(subfield=fields.StringField())
    allowed = fields.ListField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        config: Any = self
        importers = _all(graph, config.importers) - _all(graph, config.exempt)
        packages, allowed = _all(graph, config.packages), _all(graph, config.allowed)
        forbidden = [
            (importer, module, graph.get_import_details(importer=importer, imported=module))
            for importer in sorted(importers)
            for module in sorted(graph.find_modules_directly_imported_by(importer))
            if module in packages - allowed
        ]
        return ContractCheck(kept=not forbidden, metadata={"forbidden": forbidden})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for importer, module, details in check.metadata["forbidden"]:
            lines = ", ".join(f"l.{each['line_number']}" for each in details)
            output.print_error(f"{importer} may not import {module} ({lines}): it is not listed.")


def _all(graph: ImportGraph, names: list[str]) -> set[str]:
    """The modules of these names, and those below them. Raises ValueError for one there is not."""
    unknown = [name for name in names if name not in graph.modules]
    if unknown:
        raise ValueError(f"there is no module {', '.join(unknown)}")
    return {*names}.union(*(graph.find_descendants(name) for name in names))
