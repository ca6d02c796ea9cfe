"""The report of a study: a page, pictures and tables, made from the study folder."""
