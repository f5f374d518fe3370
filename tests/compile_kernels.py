"""Compile every Triton kernel for Hopper, which needs no GPU: the interpreter accepts what the compiler refuses."""

from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from msvit.fast.kernels import activation, attending, fp8, gates, merging, norms, pooling, sums, tokens, windows

NUMBERS = dict.fromkeys(("address", "which", "patch", "token"), "*i64")
NUMBERS |= dict.fromkeys(("cu_seqlens", "cu_q", "cu_k"), "*i32")
NORM = {"x": "*bf16", "shift": "*fp32", "weight": "*bf16", "bias": "*bf16", "y": "*bf16", "eps": "fp32"}
FLOATS = {"mask": "*fp32", "weight": "*fp32", "lse": "*fp32", "level": "*fp32", "dw": "*fp32", "scale": "fp32"}
CONSUMER_SHARED = 99 * 1024  # bytes of shared memory that a program can have on consumer GPUs


def check(kernel: Any, constants: dict[str, Any], warps: int = 4, stages: int = 2, **types: str) -> int:
    """Bytes of shared memory that the kernel needs."""
    known = {**NUMBERS, **FLOATS, **types}
    signature = {name: "constexpr" if name in constants else known.get(name, "i32") for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages}
    made = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print(kernel.__name__, flush=True)
    return int(made.metadata.shared)


def main() -> None:
    sizes = {"PREFIX": 1, "CELLS": 49, "PATCHES": 196, "COLUMNS": 7, "K": 2, "IDS": 256, "CHUNK": 1024}
    check(tokens._lay_out_kernel, sizes, image="*i64")
    for k in (2, 3):
        cell = {"PREFIX": 1, "CHANNELS": 3, "CELLS": 49, "COLUMNS": 7, "K": k, "SIDE": 14, "BLOCK": 16}
        check(tokens._gather_kernel, cell, image="*bf16", pixels="*bf16")
        check(tokens._gather_kernel, {**cell, "address": None}, image="*fp32", pixels="*bf16")
    for half, tiles in (("*bf16", (64, 32, 4, 3)), ("*bf16", (16, 64, 4, 3)), ("*fp32", (32, 32, 4, 2))):
        types = dict.fromkeys(("q", "k", "v", "y", "dy", "dq", "dk", "dv"), half)
        block_q, block_k, warps, stages = tiles
        shape = {"HEADS": 6, "DIM": 64, "BLOCK_Q": block_q, "BLOCK_K": block_k, "EXACT": half == "*fp32"}
        for has_key_weights in (False, True):
            given = {**shape, "HAS_KEY_WEIGHTS": has_key_weights, **({} if has_key_weights else {"weight": None})}
            check(attending._attention_kernel, given, warps, stages, **types)
            for summed in ({}, {"sums": None}):
                check(attending._attention_dq_kernel, {**given, **summed}, warps, stages, sums="*fp32", **types)
                rest = {"WEIGHTED": not has_key_weights, **({} if not has_key_weights else {"dw": None}), **summed}
                check(attending._attention_dkv_kernel, {**given, **rest}, warps, stages, sums="*fp32", **types)
    for half, area, shift in (("*bf16", 7, 3), ("*bf16", 8, 0), ("*fp32", 7, 0), ("*bf16", 16, 8), ("*bf16", 12, 6)):
        block = {7: 64, 8: 64, 12: 256, 16: 256}[area]
        shape = {"HEADS": 3, "DIM": 32, "BLOCK_Q": 64, "BLOCK_K": block, "EXACT": half == "*fp32", "SIDE": 4}
        frame = {"HIGH": 56, "WIDE": 56, "WINDOW_H": area, "WINDOW_W": area, "SHIFT_H": shift, "SHIFT_W": shift}
        types = {**dict.fromkeys("qkvy", half), "bias": "*fp32", "cell": "*i64", "rank": "*i64"}
        for block_q, memory in ((64, windows.LARGEST_TILE), (32, CONSUMER_SHARED)):
            given = {**shape, **frame, "BLOCK_Q": block_q}
            shared = check(windows._window_kernel, given, 4 if block == 64 else 8, **types)
            assert shared <= memory, f"{block_q} queries, {block} keys: {shared} bytes of shared memory"
    for given in ({}, {"weight": None, "bias": None}):
        shape = {"WIDTH": 384, "BLOCK": 512, "ROWS": 4, "SCALED": not given, "ADD_TO_X": not given}
        check(norms._norm_kernel, {**shape, **given}, 1, **NORM)
    for given in ({}, {"scale": None, "shift": None, "address": None}):
        shape = {"CHANNELS": 3, "SIDE": 4, "BLOCK": 64, "SCALED": not given}
        types = {"image": "*bf16", "scale": "*fp32", "shift": "*fp32", "mean": "*fp32", "variance": "*fp32"}
        check(pooling._moments_kernel, {**shape, **given}, 1, **types)
        shape = {"CHANNELS": 3, "SIDE": 32, "WIDTH": 96, "HIDDEN": 256, "LAST": 104, "PADDED": 128, "PADDED_LAST": 128}
        shape |= {"BLOCK": 64, "CHUNK": 64, "SCALED": not given}
        layers = (f"{name}{bias}" for name in ("stem", "first", "second", "head") for bias in ("", "_bias"))
        types |= dict.fromkeys((*layers, "position"), "*bf16") | {"logits": "*fp32"}
        assert check(gates._cell_mlp_kernel, {**shape, **given}, stages=4, **types) <= gates.SHARED_MEMORY
    check_gate_layers()
    ints = ("into", "place_of", "merged", "index", "first", "number", "new_cu_seqlens")
    types = {**dict.fromkeys(ints, "*i32"), **dict.fromkeys(("size", "score", "new_size"), "*fp32")}
    types |= dict.fromkeys(("image", "owner", "new_token", "new_image", "new_owner"), "*i64") | {"new_weight": "*fp32"}
    for half, length, heads, dim in (("bf16", 197, 6, 64), ("bf16", 100, 3, 64), ("bf16", 1024, 12, 64),
                                     ("fp16", 500, 8, 128), ("fp32", 256, 6, 64)):  # fmt: skip
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[half]
        tiles = merging._tiles(length, heads, dim, dtype)
        assert merging.can_merge(dtype, torch.empty(0, heads, dim, dtype=dtype), length)
        shape = {"PREFIX": 1, "HEADS": heads, "DIM": dim, "WIDE": dim, "EXACT": half == "fp32"}
        given = {**shape, "BLOCK": tiles.block, "CHUNK": tiles.chunk, "STEP": 256}
        shared = check(merging._match_kernel, given, tiles.warps, tiles.stages, keys=f"*{half}", **types)
        assert shared <= CONSUMER_SHARED, f"{tiles} need {shared} bytes of shared memory"
        check(merging._move_kernel, {"WIDTH": 384, "BLOCK": 512, "ROWS": 4}, x=f"*{half}", new_x=f"*{half}", **types)
    tile = {"WIDTH": 1536, "ROWS": 4, "COLUMNS": 512}
    types = dict.fromkeys(("x", "y", "dx", "dy", "bias"), "*bf16") | {"sums": "*fp32"}
    for given in ({}, {"bias": None}):
        check(activation._gelu_kernel, tile | given, **types)
        check(activation._gelu_backward_kernel, tile | given | ({"sums": None} if given else {}), **types)
    names = ("x", "total", "centre", "scale", "dtotal", "dx", "weight", "bias", "sums")
    types = dict.fromkeys(names, "*fp32") | dict.fromkeys(("u", "added", "y", "dy", "du"), "*bf16") | {"eps": "fp32"}
    for width, block in ((384, 512), (1024, 1024)):
        tiles, shape = norms._tiles_backward(block), {"WIDTH": width, "BLOCK": block}
        for given, added in (({}, {}), ({"dtotal": None}, {"added": None})):
            check(norms._add_norm_kernel, {**shape, "ROWS": 1024 // block, **added}, 1 if block == 512 else 4, **types)
            given = {**shape, "ROWS": tiles.rows, "SUMS": 2 if added else 3, **given}
            check(norms._add_norm_backward_kernel, given, tiles.warps, **types)
    types = {"x": "*bf16", "first": "*fp32", "second": "*fp32"}
    check(sums._sum_rows_kernel, {**tile, "SPLIT": 1536}, **types)
    tile = {"WIDTH": 1152, "SPLIT": 768, "ROWS": sums.PART_ROWS, "COLUMNS": sums.PART_COLUMNS}
    check(sums._sum_rows_kernel, tile, **{"x": "*fp32", "first": "*fp32", "second": "*bf16"})
    types = NORM | {"added": "*bf16", "y": "*fp8e4nv", "scale": "*fp32"}
    for given in ({}, {"added": None}):
        for width, block, warps in ((384, 512, 1), (1024, 1024, 4)):
            shape = {"WIDTH": width, "BLOCK": block, "ROWS": 2048 // block, "ADDS": not given}
            check(fp8._norm_fp8_kernel, {**shape, **given}, warps, **types)
    for width, block in ((1536, 2048), (4096, 4096)):
        check(fp8._gelu_fp8_kernel, {"WIDTH": width, "BLOCK": block, "ROWS": 1}, block // 512, **types)


def check_gate_layers() -> None:
    smallest, layers = {"SMALLEST": gates.MIN_UNIT}, dict.fromkeys(("x", "weight", "bias", "out"), "*bf16")
    wide = dict.fromkeys(("mean", "variance", "units"), "*fp32")
    shared = [check(gates._units_kernel, {"CHANNELS": 3, "PADDED": 4, "BLOCK": 4096, **smallest}, 8, **wide)]
    for channels, taps in ((3, 32), (gates.MAX_CHANNELS, 64)):
        shape = {"CHANNELS": channels, "TAPS": taps, "WIDTH": gates.MAX_WIDTH, "BLOCK": 128}
        shared.append(check(gates._stem_kernel, {**shape, **smallest}, **wide, **layers, deviation="*bf16"))
    for channels, width, plane, block, part, stages in (
        (32, 64, True, 64, 64, 3), (64, 128, False, 64, 128, 3), (128, 64, True, 64, 64, 3),
        (64, 128, False, 16, 32, 5),
    ):  # fmt: skip
        shape = {"CHANNELS": channels, "WIDTH": width, "STRIDE": channels + plane, "BLOCK": block, "PART": part}
        shape |= {"HAS_PLANE": plane, "GELU": plane, "HAS_POSITION": not plane}
        given: dict[str, Any] = {"position": None} if plane else {"plane": None}
        types = layers | {"plane": "*bf16", "position": "*bf16"}
        shared.append(check(gates._downsample_kernel, shape | given, stages=stages, **types))
    shape = {"SIDE": 5, "WIDTH": 128, "PART": 32, "BLOCK": 64}
    shared.append(check(gates._depthwise_kernel, shape, **layers, sums="*fp32"))
    names = ("mixed", "norm_weight", "norm_bias", "first", "first_bias", "second", "second_bias")
    end = ("last_weight", "last_bias", "head", "head_bias")
    types = layers | dict.fromkeys((*names, *end), "*bf16") | {"sums": "*fp32", "eps": "fp32", "last_eps": "fp32"}
    for last, block, chunk, warps in ((False, 64, 64, 4), (True, 64, 64, 4), (True, 16, 128, 8)):
        shape = {"WIDTH": 128, "HIDDEN": 256, "BLOCK": block, "CHUNK": chunk, "SUMS": 16, "LAST": last}
        given = {} if last else dict.fromkeys(end)
        out = {"out": "*fp32" if last else "*bf16"}
        shared.append(check(gates._mix_kernel, shape | given, warps, **(types | out)))
    assert max(shared) <= gates.SHARED_MEMORY, f"{shared} bytes of shared memory"


if __name__ == "__main__":
    main()
