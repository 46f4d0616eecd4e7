"""Benchmarks: tasks from local files, requests as tokens, scores with torch alone, results.

prompts.py and tasks.py read questions, requests.py turns them into tokens, scoring.py asks a model
for log-likelihoods and generation.py for texts, answers.py and latex.py read its answers in them,
results.py makes accuracies of all, models.py loads what is evaluated.
"""
