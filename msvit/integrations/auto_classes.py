"""transformers' Auto classes and pipelines for folders of converted models, from `import msvit` on.

    register_on_import()          # nothing is imported for it: if transformers never is, nothing happens

`msvit.integrations.transformers` registers its classes when it is imported. That is done once transformers' own module
of Auto classes has been: at once where it has been before, else behind it.
"""

import sys
from contextlib import suppress
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any

AUTO = "transformers.models.auto.modeling_auto"


def register_on_import() -> None:
    """Register the Auto classes now or, if transformers is not imported yet, once it is."""
    if AUTO in sys.modules:
        register()
    else:
        sys.meta_path.insert(0, Finder())


def register() -> None:
    """Import the module that registers the Auto classes, if transformers is new enough."""
    with suppress(ImportError):  # of a transformers that is too old, which its users shall have all the same
        import_module(f"{__package__}.transformers")


class Finder(MetaPathFinder):
    """A finder of the module of Auto classes, used once: it registers ours when that module has run."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return the spec of transformers' Auto classes, found by the other finders; None for other modules."""
        if fullname != AUTO:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_register(module: Any) -> None:
                run(module)
                register()

            spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec
