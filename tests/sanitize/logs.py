"""Texts as compute-sanitizer's manual shows them, on functions of our own subject; written by hand.

NVIDIA compute-sanitizer documentation, sections on memcheck, racecheck, initcheck and synccheck: OLD has the
form of 2020 (`at 0x70 in FILE:LINE:FUNCTION`), the others that of later versions.
"""

# ruff: noqa: E501

MEMCHECK = """\
========= COMPUTE-SANITIZER
the kernel's own output
========= Invalid __global__ read of size 4 bytes
=========     at chunk_scaled_dot_kkt_fwd_kernel+0x9a0 in /site/fla/ops/common/chunk_scaled_dot_kkt.py:63
=========     by thread (31,0,0) in block (3,1,0)
=========     Access at 0x7f2a16600ffc is out of bounds
=========     and is 4 bytes after the nearest allocation at 0x7f2a16600000 of size 4,092 bytes
=========
========= Invalid __global__ read of size 4 bytes
=========     at chunk_scaled_dot_kkt_fwd_kernel+0x9a0 in /site/fla/ops/common/chunk_scaled_dot_kkt.py:63
=========     by thread (30,0,0) in block (3,1,0)
=========     Access at 0x7f2a16600ff8 is out of bounds
=========     and is 8 bytes after the nearest allocation at 0x7f2a16600000 of size 4,092 bytes
=========
========= Invalid __shared__ write of size 16 bytes
=========     at void some_kernel<float, (int)4>(float *, int)+0x160
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x400 is misaligned
=========
========= Program hit cudaErrorLaunchFailure (error 719) due to "unspecified launch failure" on CUDA API call to cudaDeviceSynchronize.
=========
========= ERROR SUMMARY: 4 errors
"""
OLD = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at 0x70 in memcheck_demo.cu:6:recompute_w_u_fwd_kernel(int*)
=========     by thread (0,0,0) in block (1,0,0)
=========     Address 0x7f6510c00001 is misaligned
=========
========= ERROR SUMMARY: 1 error
"""
RACECHECK = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at merge_16x16_to_64x64_inverse_kernel+0x210 in /site/solve_tril.py:291
=========     and Read access at merge_16x16_to_64x64_inverse_kernel+0x2f0 in /site/solve_tril.py:302 [508 hazards]
=========
========= Warning: Race reported between Write access at helper_kernel+0x10 in a.cu:3
=========     and Write access at helper_kernel+0x20 in a.cu:4 [2 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""
HAZARDS = """\
========= COMPUTE-SANITIZER
========= ERROR: Potential WAW hazard detected at __shared__ 0x0 in block (2,0,0) :
=========     Write Thread (0, 0, 0) at 0x000003c8 in /home/demo.cu:16:chunk_fwd_kernel_o(int*, int*)
=========     Write Thread (1, 0, 0) at 0x000003c8 in /home/demo.cu:16:chunk_fwd_kernel_o(int*, int*)
=========     Current Value : 0, Incoming Value : 2
=========
========= ERROR: Potential WAW hazard detected at __shared__ 0x4 in block (2,0,0) :
=========     Write Thread (2, 0, 0) at 0x000003c8 in /home/demo.cu:16:chunk_fwd_kernel_o(int*, int*)
=========     Write Thread (3, 0, 0) at 0x000003c8 in /home/demo.cu:16:chunk_fwd_kernel_o(int*, int*)
=========     Current Value : 0, Incoming Value : 2
=========
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""
INITCHECK = """\
========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 2 bytes
=========     at chunk_fwd_kernel_o+0x4f0 in /site/chunk_o.py:101
=========     by thread (5,0,0) in block (1,4,1)
=========     Address 0x7f9f01a00e00
=========
========= ERROR SUMMARY: 1 error
"""
SYNCCHECK = """\
========= COMPUTE-SANITIZER
========= Barrier error detected. Divergent thread(s) in block.
=========     at fused_recurrent_gated_delta_rule_fwd_kernel+0x80 in /site/fused_recurrent.py:70
=========     by thread (0,0,0) in block (0,7,0)
=========
========= ERROR SUMMARY: 1 error
"""
CLEAN = """\
========= COMPUTE-SANITIZER
========= ERROR SUMMARY: 0 errors
"""
CLEAN_RACECHECK = """\
========= COMPUTE-SANITIZER
========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)
"""
PROBED = """\
========= COMPUTE-SANITIZER
========= Program hit CUDA_ERROR_INVALID_VALUE (error 1) due to "invalid argument" on CUDA API call to cuPointerGetAttribute.
=========
========= ERROR SUMMARY: 1 error
"""
REFUSED = """\
========= COMPUTE-SANITIZER
========= Error: Device not supported. Please refer to the "Supported Devices" section of the sanitizer documentation
=========
"""
CUT = """\
========= COMPUTE-SANITIZER
"""
UNKNOWN = """\
========= COMPUTE-SANITIZER
========= Something that a later version says
=========     at chunk_fwd_kernel_o+0x4f0 in /site/chunk_o.py:101
=========
========= ERROR SUMMARY: 1 error
"""
