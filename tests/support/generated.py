"""Tables of the documentation that programs write: the block between the comments ``<!-- NAME: generated -->`` and
``<!-- NAME: end -->``."""

from pathlib import Path


def _parts(name: str, page: Path) -> tuple[str, str, str]:
    """The text before the block `name`, the block, and the text after it."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(f"<!-- {name}: generated -->\n")
    block, end, after = rest.partition(f"\n<!-- {name}: end -->")
    assert begin and end, f"{page} has no block {name!r}"
    return before + begin, block, end + after


def read(name: str, page: Path) -> str:
    return _parts(name, page)[1]


def write(name: str, content: str, page: Path) -> None:
    before, _, after = _parts(name, page)
    page.write_text(before + content + after, encoding="utf-8")
