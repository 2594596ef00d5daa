"""An agent of LangGraph: a model node, a tool node, and an edge to the tools while there are calls."""

import json
import os

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def multiply(a: int, b: int) -> int:
    """The product of two numbers."""
    return a * b


model = ChatOpenAI(model="policy").bind_tools([multiply])
graph = StateGraph(MessagesState)
graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
graph.add_node("tools", ToolNode([multiply]))
graph.add_edge(START, "model")
graph.add_conditional_edges("model", tools_condition)
graph.add_edge("tools", "model")
question = json.loads(os.environ["RLSYS_ROW"])["prompt"][0]["content"]
messages = graph.compile().invoke({"messages": [("user", question)]})["messages"]
assert messages[-1].content == "42", messages
