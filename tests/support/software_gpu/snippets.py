"""A kernel around a few instructions, for tests of the machine itself."""

from __future__ import annotations

KERNEL = """
.version 8.7
.target sm_90a
.extern .shared .align 16 .b8 global_smem[];
.visible .entry tested(
	.param .u64 .ptr .global .align 1 tested_param_0,
	.param .u64 .ptr .global .align 1 tested_param_1,
	.param .u64 .ptr .global .align 1 tested_param_2,
	.param .u64 .ptr .global .align 1 tested_param_3
)
{
	.reg .pred 	%p<20>;
	.reg .b16 	%rs<20>;
	.reg .b32 	%r<20>;
	.reg .b64 	%rd<20>;
	ld.param.b64 	%rd10, [tested_param_0];
	ld.param.b64 	%rd11, [tested_param_1];
	ld.param.b64 	%rd12, [tested_param_2];
	ld.param.b64 	%rd13, [tested_param_3];
	mov.u32 	%r10, %tid.x;
	mov.u32 	%r11, %ctaid.x;
	mov.u32 	%r12, %ntid.x;
	mad.lo.s32 	%r13, %r11, %r12, %r10;
	mul.wide.u32 	%rd14, %r13, WIDE;
	add.s64 	%rd10, %rd10, %rd14;
	add.s64 	%rd11, %rd11, %rd14;
	add.s64 	%rd12, %rd12, %rd14;
	add.s64 	%rd13, %rd13, %rd14;
BODY
	ret;
}
"""


def kernel(body: str, wide: int = 4) -> str:
    """A kernel with `body` in its middle; %rd10 to %rd13 point to this thread's element of its four tensors."""
    return KERNEL.replace("WIDE", str(wide)).replace("BODY", body)
