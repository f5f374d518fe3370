"""Evaluation: what a model gives and what it costs.

    result = evaluate(model, loader)          # accuracy, tokens, MACs, masks: exact, image by image
    rows = measure_latency(model, images)     # medians, alternating, with device, precision, batch and mode named
"""
