import time
def f(x): return x
def loop(n):
    a=time.process_time()
    for _ in range(n): f(1)
    return (time.process_time()-a)/n*1e9
print("ns per call", [round(loop(300000)) for _ in range(5)])
