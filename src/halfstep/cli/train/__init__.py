"""``halfstep train``: a small byte-level GPT on real text, in fp32, bf16 and fp16, alone, under DDP and under FSDP2."""
