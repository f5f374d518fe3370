"""Evaluation: how good a model is, and what it costs.

    result = evaluate_classifier(model, loader, num_classes=8)       # accuracy, tokens, MACs, masks of every image
    result = evaluate_segmenter(model, loader, Slide(window=512))    # mIoU; the others of every window
    rows = measure_latency(model, images)     # medians, alternating, with device, precision, batch and mode named
"""
