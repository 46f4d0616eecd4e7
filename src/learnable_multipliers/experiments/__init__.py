"""The paper's figures and tables as experiments: runs, records, claims, verdicts, plots."""
