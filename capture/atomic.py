"""Write a file whole or not at all: a temporary name beside the target, then os.replace.

The idea: a reader never sees half a file, and a failed write leaves the old file (or none) in place.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import BadInput


@contextmanager
def atomic_path(target: Path | str) -> Iterator[Path]:
    """Give a temporary path in the target's directory; on success it becomes `target`, else it is removed.

    The directory is made where it is missing. Raises BadInput where it cannot be written.
    """
    target = Path(target)
    if target.is_dir():
        raise BadInput(f"{target}: is a directory; give the name of a file")
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        # Some writers (safetensors) make the file private; a case is to be shared as the umask says.
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        os.replace(temporary, target)
    except OSError as error:
        reason = error.strerror or str(error)
        raise BadInput(f"{target}: cannot be written ({reason}); choose another place") from None
    finally:
        if temporary.exists():
            temporary.unlink()
