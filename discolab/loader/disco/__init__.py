"""Disco's ShardLoader, under Disco's names and with its meanings."""
