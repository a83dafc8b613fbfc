"""Drafts made for a target: it writes text, a student of a few of its layers learns to continue that text as it would.

After FastDraft (2411.11055) and DistillSpec (2310.08461). `python -m duoexp.distill model=NAME`, settings in
`conf/distill.yaml`; `model.draft=FOLDER` brings the folder that comes out of it to life.
"""
