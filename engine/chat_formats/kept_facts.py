"""What was found of chat templates, kept on disk by their content: a template that was found sound
is not tried again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path

from penstock.engine.chat_formats.template_facts import VERSION, ModelFacts
from penstock.engine.text.chat_template import TemplateFiles


def kept_facts(files: TemplateFiles) -> ModelFacts | None:
    """None: nothing is kept of these templates."""
    try:
        return ModelFacts.from_fields(json.loads(_file(files).read_text("utf-8")))
    except (RuntimeError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def keep_facts(files: TemplateFiles, facts: ModelFacts) -> None:
    """Where there is no place for it, it is found again next time."""
    with contextlib.suppress(RuntimeError, OSError):
        path = _file(files)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(facts.as_fields(), file)
        Path(file.name).replace(path)


def _file(files: TemplateFiles) -> Path:
    wanted = [VERSION, files.source, dict(files.named), dict(files.special_tokens)]
    digest = hashlib.sha256(json.dumps(wanted).encode()).hexdigest()
    chosen = os.environ.get("PENSTOCK_CACHE_DIR")  # as `kernels.cpu.build` does
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(chosen) if chosen else Path(home, "penstock")
    return folder / "templates" / f"{digest}.json"
