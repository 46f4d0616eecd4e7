"""Benchmarks: tasks from local files, requests as tokens, scores with torch alone, results.

items.py and tasks.py read questions, requests.py turns them into tokens, scoring.py asks a model
for log-likelihoods, results.py makes accuracies of them, models.py loads what is evaluated.
"""
