"""The inner loops of codecs and exchange, one interface, several implementations held against plain torch.

reference           signs to bits and back, scales: what the codecs use
fused_reference     Kernels, those of the exchange in plain torch: the definition, and what runs on other devices
added               what a kernel adds to kept sums: a vector, a momentum, one with factors, the mean of rows
cpu                 the same in numba, on the short vectors of `vectors` and the views of `arrays`; signs become bits in
                    cpu._pack, 8 or 64 at a time
kept                what is asked of kept sums now and then: errors that were left out, and the largest of them
blocks              where the blocks of a bucket lie, in its vector and in wire memory
choose              which of them a vector gets, and narrowing to bfloat16 by the one that it gets
"""
