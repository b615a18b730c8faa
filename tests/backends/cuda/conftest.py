"""Where there is no GPU, Triton's kernels run in its interpreter; that is decided when their module is first read."""

import importlib.util
import os
from pathlib import Path

if importlib.util.find_spec("triton") is not None and not Path("/dev/nvidia0").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    def _patch_scalars(tensor, scope):
        """Scalars are arrays of one element there, which NumPy 2.5 no longer takes for integers."""
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_scalars
