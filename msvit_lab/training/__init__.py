"""Training: a configuration in, a run folder out.

    config = override(recipes.scenes(), {"gate.target": "0.1"})
    train(config, out="runs/scenes")             # config.json, metrics.jsonl, checkpoint.safetensors, model/
    train(config, out="runs/scenes", resume=True)
"""
