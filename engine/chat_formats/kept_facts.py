"""What was found of chat templates, kept on disk by their content: a template that was found sound
is not tried again."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path

from penstock.engine.chat_formats.template_facts import VERSION, ModelFacts
from penstock.engine.text.chat_template import TemplateFiles
from penstock.kernels.cache_folder import NoCacheError, cache_dir, is_private, unfinished


def kept_facts(files: TemplateFiles) -> ModelFacts | None:
    """None: nothing is kept of these templates, or others may have written it."""
    try:
        path = _file(files)
        if not (is_private(path) and is_private(path.parent)):
            return None
        return ModelFacts.from_fields(json.loads(path.read_text("utf-8")))
    except (NoCacheError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def keep_facts(files: TemplateFiles, facts: ModelFacts) -> None:
    """Where there is no place for it, it is found again next time."""
    with contextlib.suppress(NoCacheError, OSError):
        path = _file(files)
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished(path.parent) as own:
            fresh = own / path.name
            fresh.write_text(json.dumps(facts.as_fields()), "utf-8")
            fresh.replace(path)


def _file(files: TemplateFiles) -> Path:
    """Raises: NoCacheError."""
    wanted = [VERSION, files.source, dict(files.named), dict(files.special_tokens)]
    digest = hashlib.sha256(json.dumps(wanted).encode()).hexdigest()
    return cache_dir() / "templates" / f"{digest}.json"
