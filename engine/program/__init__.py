"""What a model's program is made of: its matrices as an interpreter reads them, and who adds up."""
