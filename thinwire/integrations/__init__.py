"""Thinwire inside the trainers that people use: a file for each library, which needs that library alone.

transformers.py, accelerate.py: a Trainer and an Accelerator that do not wrap the model. ddp.py: DistributedDataParallel
stays as the wrapper, and sends nothing. docs/integrations.md has a section for each.
"""
