"""Triton's CPU interpreter made fit for GDN kernels, from outside: no file of Triton or fla is changed.

`install()` in a worker before anything imports triton, `after_import()` once the kernel's package is
imported (again after later imports; all of it can be repeated). One module per thing that is mended.
"""

from .shims import after_import, describe, install

__all__ = ["after_import", "describe", "install"]
