"""The report of a study: a page, pictures and tables, from the folder of the study alone."""
