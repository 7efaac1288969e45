#!/usr/bin/env python
"""Continue a prompt with the newest checkpoint of a run, on one process, whatever layout wrote it.

python tools/generate.py --load runs/quickstart --prompt 'def main(' --tokens 60
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", required=True, help="directory of checkpoints")
    parser.add_argument("--prompt", default="import ", help="text to continue")
    parser.add_argument("--tokens", type=int, default=60, help="how many to add")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token")
    parser.add_argument("--top-k", type=int, default=40, help="sample from the K likeliest tokens")
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args()
    for name, least in (("tokens", 1), ("top_k", 1), ("temperature", 0)):
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} is below {least}")
    import torch

    from megalite.checkpoint.manifest import CheckpointError
    from megalite.data.indexed import DataError
    from megalite.train.sample import continue_ids, load_model
    from megalite.train.setup import SetupError

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        model, config, tokenizer, step = load_model(args.load, device)
    except (SetupError, CheckpointError, DataError) as error:
        print(f"generate.py: {error}", file=sys.stderr)
        return 3
    prompt = tokenizer.encode(args.prompt) or [tokenizer.eod]
    ids = continue_ids(
        model,
        prompt,
        args.tokens,
        limit=config.model.positions,
        vocab_size=tokenizer.vocab_size,
        temperature=args.temperature,
        top_k=args.top_k,
        seed=args.seed,
    )
    print(f"[step {step}] {tokenizer.decode(ids)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
