"""Whole texts that tests compare with: to renew one, delete its file in tests/golden and run the test."""

from pathlib import Path

FOLDER = Path(__file__).parent / "golden"


def assert_golden(name: str, text: str) -> None:
    path = FOLDER / name
    if not path.is_file():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        raise AssertionError(f"{path} did not exist and was written; read it, and run the test again")
    assert text.splitlines() == path.read_text(encoding="utf-8").splitlines()
