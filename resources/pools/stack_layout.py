"""Where do the files of a local stack lie?"""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

MAX_SOCKET_PATH_BYTES = 100
"""Unix sockets have room for 107 bytes of path."""


@dataclass(frozen=True, slots=True)
class StackLayout:
    """Paths of the stack whose state folder is ``state_dir`` (absolute)."""

    state_dir: Path

    @classmethod
    def prepare(cls, state_dir: str | os.PathLike[str]) -> StackLayout:
        """Create the folders.

        Raises:
            ValueError: the state folder cannot be created or written.
        """
        layout = cls(Path(state_dir).expanduser().resolve())
        try:
            for folder in (layout.logs, layout.prefect_home):
                folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=layout.state_dir):
                pass
        except OSError as error:
            raise ValueError(
                f"the state folder {layout.state_dir} cannot be written ({error.strerror}); choose another one, or "
                "give this user the right to write there"
            ) from error
        return layout

    @property
    def logs(self) -> Path:
        return self.state_dir / "logs"

    @property
    def prefect_home(self) -> Path:
        return self.state_dir / "prefect"

    @property
    def database(self) -> Path:
        return self.prefect_home / "prefect.db"

    @property
    def start_lock(self) -> Path:
        """Held by the driver that starts a supervisor."""
        return self.state_dir / "start.lock"

    @property
    def supervisor_lock(self) -> Path:
        """Held by the supervisor while anything of the stack runs."""
        return self.state_dir / "supervisor.lock"

    def log(self, child: str) -> Path:
        """Log file of a process of the stack."""
        return self.logs / f"{child}.log"

    def tail(self, child: str, lines: int = 15) -> str:
        """The end of a process's log."""
        try:
            return "\n".join(self.log(child).read_text(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return "(no log)"

    def socket(self) -> Path:
        """Path of the supervisor's socket: in the state folder, or, when that path is too long, in a private folder of
        this user under the temporary directory.

        Raises:
            ValueError: that folder belongs to somebody else.
        """
        path = self.state_dir / "supervisor.sock"
        if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
            return path
        folder = Path(tempfile.gettempdir()) / f"rollart-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        owner = folder.lstat()
        if owner.st_uid != os.getuid() or owner.st_mode & 0o077:
            raise ValueError(f"{folder} must be a folder of this user only (mode 700); remove it or set TMPDIR")
        return folder / f"{hashlib.sha256(os.fsencode(self.state_dir)).hexdigest()[:24]}.sock"
