"""Functions with the rule's signature that misbehave on request; the worker tests run them by import path."""

import ctypes
import importlib.util
import os
import sys
import time

import torch

seen = []


def origin(name):
    """Where a package would be imported from; None where it is not found."""
    spec = importlib.util.find_spec(name)
    return None if spec is None else str(spec.origin or list(spec.submodule_search_locations or ()))


def zero_state(q, v, cu_seqlens):
    return torch.zeros(len(cu_seqlens) - 1, v.shape[1], q.shape[-1], v.shape[-1])


def echo(
    q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens, fault="", seconds=0.0, names=()
):
    """Returns v and the initial state bit for bit, after doing what `fault` says."""
    state = zero_state(q, v, cu_seqlens) if initial_state is None else initial_state
    match fault:
        case "segv":
            ctypes.string_at(0)
        case "abort":
            os.abort()
        case "exit":
            os._exit(7)
        case "sys.exit":
            sys.exit("I am done")
        case "sleep":
            time.sleep(3600)
        case "flood":
            while True:
                print("x" * 100_000)
        case "raise":
            raise ValueError("first line\n\n   second line\n" + "detail " * 500)
        case "print":
            os.write(1, b"\x00\xff\x93 not a message\n" * 1000)
            print("to stdout", file=sys.__stdout__)
        case "shape":
            return v[:-1], state
        case "none":
            return None
        case "three":
            return v, state, state
        case "integers":
            return v.long(), state
        case "no state":
            return v, None
        case "numpy":
            return v.float().numpy(), state
        case "writes":
            beta[0, 0] = 7
        case "reads fresh memory":
            return torch.empty_like(v), torch.empty(state.shape)
        case "overruns":
            output = torch.empty_like(v)
            output.copy_(v)
            torch.as_strided(output, (1,), (1,), output.storage_offset() + output.numel() + 2).fill_(1)
            torch.as_strided(beta, (1,), (1,), beta.storage_offset() - 1).fill_(1)
            return output, state
        case "large":
            return v, torch.arange(state.numel(), dtype=torch.float32).reshape(state.shape)
        case "count":
            seen.append(os.getpid())
            return torch.full_like(v, float(len(seen))), torch.full_like(state, float(os.getpid()))
        case "packages":
            raise RuntimeError(repr({name: origin(name) for name in names}))
        case "child":
            if os.fork() == 0:
                time.sleep(3600)
            time.sleep(3600)
    if seconds:
        time.sleep(seconds)
    return v, state


not_a_function = 3
