"""Turning trained linear layers into 2-bit codes: calibration, GPTQ, and lossless ternary detection."""
