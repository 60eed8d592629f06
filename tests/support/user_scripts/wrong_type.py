"""Arguments of another type than the function takes."""

import jaxgrpo as jg

jg.train(5)  # error: reportArgumentType
jg.evaluate(jg.load_config("quickstart"))  # error: reportArgumentType
jg.train("quickstart", advantage="grpo")  # error: reportArgumentType
jg.train("quickstart", dataset=["1+1=", "1+2="])  # error: reportArgumentType
jg.train("quickstart", mesh={"platform": "npu"})  # error: reportArgumentType
