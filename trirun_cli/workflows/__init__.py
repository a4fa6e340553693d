"""What a command calls and a program can call: quantize, pack, finetune, diagnose. They print nothing."""
