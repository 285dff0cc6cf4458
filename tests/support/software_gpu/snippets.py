"""A kernel that contains a few given instructions, for tests of the machine."""

from .amd import ASSUMED

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


# Loads the four pointers into s[4:11] and the offset of this thread's element into v1; v2 is the thread of the launch.
WAVE_KERNEL = """
	.amdgcn_target "amdgcn-amd-amdhsa--gfx942"
tested:
	s_load_dwordx8 s[4:11], s[0:1], 0x0
	v_lshl_add_u32 v2, s2, BLOCK, v0
	v_mul_u32_u24_e32 v1, WIDE, v2
	s_waitcnt lgkmcnt(0)
BODY
	s_endpgm
	.section	.rodata
	.amdhsa_kernel tested
ASSUMED
		.amdhsa_user_sgpr_count 2
		.amdhsa_user_sgpr_kernarg_preload_length 0
		.amdhsa_next_free_vgpr 64
		.amdhsa_kernarg_size 32
	.end_amdhsa_kernel
    .args:
ARGUMENTS
    .group_segment_fixed_size: 0
"""


def wave_kernel(body: str, wide: int = 4, threads: int = 64) -> str:
    """The kernel in AMD's assembly, for blocks of `threads` threads, a power of two."""
    arguments = "\n".join(f"      - .offset:         {8 * at}\n        .size:           8" for at in range(4))
    assumed = "\n".join(f"\t\t.amdhsa_{key} {value}" for key, value in ASSUMED.items())
    text = WAVE_KERNEL.replace("ASSUMED", assumed).replace("ARGUMENTS", arguments)
    return text.replace("BLOCK", str(threads.bit_length() - 1)).replace("WIDE", str(wide)).replace("BODY", body)
