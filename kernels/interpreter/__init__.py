"""Triton's CPU interpreter made fit for GDN kernels, from outside: no file of Triton or fla is changed.

`install()` in a worker, best before anything imports triton. One module per thing that is mended;
`shims` applies them, and modules of kernels are mended when their functions first run.
"""

from .shims import after_import, describe, install

__all__ = ["after_import", "describe", "install"]
