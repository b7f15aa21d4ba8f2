"""What every task stands on: cached stages, the artifact store, runners, the sandbox and HTTP.

This wing knows no word of model merging.
"""
