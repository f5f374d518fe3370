"""The command `msvit`, or `python -m msvit`."""

import sys
from importlib.util import find_spec

# What the command needs besides the library: the extra `lab`.
PACKAGES = ["accelerate", "filelock", "jaxtyping", "jinja2", "matplotlib", "pydantic", "rich", "torchmetrics", "typer"]


def main() -> None:
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        sys.exit(f"the command msvit needs {', '.join(missing)}; pip install 'msvit[lab]'")
    from msvit_lab.cli import app

    app()


if __name__ == "__main__":
    main()
