"""Hooks of attention's scores; conventions: hooks.py."""

import triton
import triton.language as tl  # noqa: F401, Triton's interpreter asks for it


@triton.jit
def multiply_score(score, b, h, i, j, factor):
    return score * factor


@triton.jit
def multiply_score_backward(dscore, score, b, h, i, j, factor):
    return dscore * factor, dscore * score


@triton.jit
def forget(score, b, h, i, j, of_query, of_key):
    return score + (of_query - of_key)


@triton.jit
def forget_backward(dscore, score, b, h, i, j, of_query, of_key):
    return dscore, dscore, -dscore
