"""Two small sound kernels, written to be broken: every value of interest passes through a named point.

The idea: a fault is a function put at one point, `edit(value, run) -> value`; `run` holds every earlier
point's value as an attribute, so an edit can say "the cumsum, plus the last chunk's". With no edit the
kernels are sound: a chunk kernel that rounds its operands to the dtype of v as flash-linear-attention does,
and a float32 recurrence.
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import torch

L2NORM_EPS = 1e-6


class Run:
    """One call of a kernel with faults at some of its points."""

    def __init__(self, edits, memory):
        self.edits = edits
        self.memory = memory
        """What a fault remembers from call to call."""
        self.tap = memory.get("tap")
        """Sees every point after its edit, and may put another value there (`faulty_stages`)."""

    def at(self, point, value):
        """The value of a point, as its edit leaves it."""
        edit = self.edits.get(point)
        if edit is not None:
            value = edit(value, self)
        if self.tap is not None:
            value = self.tap(point, value, self)
        setattr(self, point, value)
        return value

    def narrow(self, x):
        """Rounded to the dtype of v, kept in float32."""
        return x.to(self.call.v.dtype).float()

    def load(self, call):
        """Take in a call: `call`, head map, l2norm; float32 copies of q, k, v, g, beta."""
        self.call = self.at("inputs", call)
        c = self.call
        self.hv, self.hk = c.v.shape[1], c.q.shape[1]
        self.key_head = self.at("key_head", torch.arange(self.hv) // (self.hv // self.hk))
        q, k = c.q.float(), c.k.float()
        if c.l2norm:
            q, k = (self.at(f"norm_{n}", self._unit(x)) for n, x in (("q", q), ("k", k)))
        self.q_all, self.k_all = q[:, self.key_head], k[:, self.key_head]
        self.scale = self.at("scale", c.scale)
        self.spans = list(pairwise(c.cu_seqlens.tolist()))

    def _unit(self, x):
        root = (x.square().sum(-1, keepdim=True) + self.at("eps", L2NORM_EPS)).sqrt()
        return self.narrow(x / root)

    def starting(self, sequence):
        """[HV, K, V] float32 state that a sequence starts from."""
        c = self.call
        zero = torch.zeros(self.hv, c.k.shape[-1], c.v.shape[-1])
        return self.at("start", zero if c.state is None else c.state[sequence].float().clone())

    def results(self, output, final):
        return self.at("output", output), self.at("final", final)


def chunk(call, edits, memory, size=64):
    """The chunk form. call: SimpleNamespace of q, k, v, g, beta, cu_seqlens, state, scale, l2norm."""
    run = Run(edits, memory)
    run.load(call)
    run.size = size
    v = run.call.v
    output = torch.zeros(v.shape)
    final = torch.zeros(len(run.spans), run.hv, run.call.k.shape[-1], v.shape[-1])
    for sequence, span in enumerate(run.spans):
        run.sequence, (run.begin, run.end) = sequence, span
        state = run.starting(run.sequence)
        for number, first in enumerate(range(run.begin, run.end, size)):
            run.chunk = number
            run.rows = torch.arange(first, min(first + size, run.end))
            run.first_row, run.length = first, len(run.rows)
            run.closes = first + size >= run.end
            run.state_in = state
            output[run.at("store", run.rows)] = _chunk_output(run).transpose(0, 1)
            state = run.at("state", run.state_out)
        final[run.sequence] = run.at("last", state)
    return run.results(output.to(v.dtype), final)


def _chunk_output(run):
    """All stages of one chunk; every tensor is [HV, L, X]."""
    take, narrow, c = run.at("take", run.rows), run.narrow, run.call
    q = run.at("q", run.q_all[take].transpose(0, 1))
    k = run.at("k", run.k_all[take].transpose(0, 1))
    v = run.at("v", c.v[take].float().transpose(0, 1))
    g = run.at("g", c.g[take].float().transpose(0, 1))
    beta = run.at("beta", c.beta[take].float().transpose(0, 1))[..., None]
    total = run.at("cumsum", g.cumsum(-1))
    growth = run.at("growth", total.exp())[..., None]
    decay = run.at("decay", (total[:, :, None] - total[:, None, :]).exp())
    square = torch.ones(len(take), len(take), dtype=torch.bool)
    strict, lower = run.at("kkt_mask", square.tril(-1)), run.at("qk_mask", square.tril())
    scores = run.at("kk", _dot(run, k, k.mT))
    kkt = run.at("kkt", torch.where(strict, scores * decay * run.at("kkt_beta", beta), 0.0))
    solve = run.at("solve", narrow(inverse(kkt)))
    u = run.at("u", narrow(_dot(run, solve, narrow(v * run.at("u_beta", beta)))))
    w = run.at("w", narrow(_dot(run, solve, narrow(k * run.at("w_beta", beta) * growth))))
    v_new = run.at("v_new", u - _dot(run, w, narrow(run.at("seen", run.state_in))))
    qk = run.at("qk", narrow(torch.where(lower, _dot(run, q, k.mT) * decay, 0.0)))
    h = run.at("h", narrow(run.state_in))
    o = run.at("o", (_dot(run, q, h) * growth + _dot(run, qk, narrow(v_new))) * run.scale)
    last = total[:, -1:]
    left = run.at("left", (last - total).exp())[..., None]
    kept = run.at("kept", last.exp())[..., None]
    run.state_out = kept * run.state_in + _dot(run, k.mT, narrow(v_new * left))
    return o


def _dot(run, a, b):
    return run.at("dot", run.edits["product"](a, b) if "product" in run.edits else a @ b)


def inverse(kkt):
    """(I + A)^-1 of strictly lower A [H, L, L]."""
    eye = torch.eye(kkt.shape[-1])
    return torch.linalg.solve_triangular(eye + kkt, eye.expand_as(kkt), upper=False, unitriangular=True)


def recurrent(call, edits, memory):
    """The recurrence, token by token, in float32; only the output is rounded."""
    run = Run(edits, memory)
    run.load(call)
    v = run.call.v
    output = torch.zeros(v.shape)
    final = torch.zeros(len(run.spans), run.hv, run.call.k.shape[-1], v.shape[-1])
    for sequence, span in enumerate(run.spans):
        run.sequence, (run.begin, run.end) = sequence, span
        state = run.starting(run.sequence)
        for token in range(run.begin, run.end):
            run.token = token
            output[token], state = _one_token(run, state)
        final[run.sequence] = run.at("last", state)
    return run.results(output.to(v.dtype), final)


def _one_token(run, state):
    c, t = run.call, run.token
    q, k = run.q_all[t][..., None], run.k_all[t][..., None]
    beta = run.at("beta", c.beta[t].float())[:, None, None]
    run.before = state
    decay = run.at("decay", c.g[t].float().exp())[:, None, None]
    state = run.at("decayed", state * decay)
    read = run.at("read", (k * state).sum(1, keepdim=True))
    u = run.at("u", beta * (c.v[t].float()[:, None, :] - read))
    state = run.at("state", state + k * u)
    return run.at("o", (q * run.at("seen", state)).sum(1) * run.scale), state


BASES = {"chunk": chunk, "recurrent": recurrent}


def namespace(**fields):
    return SimpleNamespace(**fields)
