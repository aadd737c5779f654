"""Operations around the rule under judgement: one file per operation, and the chain of them."""
