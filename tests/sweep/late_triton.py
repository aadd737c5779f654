"""A tuned Triton kernel whose module imports triton only when it is called."""


def rule(*tensors, **options):
    from gdncheck.kernels import planted_triton

    return planted_triton.rule(*tensors, **options)
