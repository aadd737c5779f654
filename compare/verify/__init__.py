"""Speculative verify: are the outputs, and the state after every token of a draft, where they belong?"""
