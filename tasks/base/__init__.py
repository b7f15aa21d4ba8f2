"""Foundation of every task: cached stages, the artifact store, runners, the sandbox and HTTP.

This wing knows no word of model merging.
"""
