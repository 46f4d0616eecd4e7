"""Benchmarks: tasks from local files, tokenized requests, scores with torch alone, results.

prompts.py and tasks.py read questions, requests.py tokenizes them, scoring.py computes
log-likelihoods, generation.py generates texts, answers.py and latex.py extract and compare answers,
results.py computes accuracies, models.py loads the models.
"""
