"""TEMPORARY"""
import numpy as np
def prefix_split(loss, avg_bits): return [int(avg_bits)]*len(loss)
def greedy_bits(cost, nbytes, budget):
    n=len(cost)
    return np.full(n, max(i for i,b in enumerate(nbytes) if b*n<=budget)+1)
