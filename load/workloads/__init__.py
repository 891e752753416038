"""What is sent and when: datasets make dialogues, arrivals say when each starts, a driver sends."""
