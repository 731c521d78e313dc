"""Titles of what the rows cite. A row's `paper` names a source by its arXiv number or by "Author year"."""

from typing import NamedTuple


class Paper(NamedTuple):
    title: str
    link: str


ARXIV = {
    "1503.02531": "Distilling the Knowledge in a Neural Network",
    "1512.00567": "Rethinking the Inception Architecture for Computer Vision",
    "1602.01783": "Asynchronous Methods for Deep Reinforcement Learning",
    "1606.07947": "Sequence-Level Knowledge Distillation",
    "1702.08165": "Reinforcement Learning with Deep Energy-Based Policies",
    "1707.06347": "Proximal Policy Optimization Algorithms",
    "1708.02002": "Focal Loss for Dense Object Detection",
    "1802.01561": "IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner Architectures",
    "1909.08593": "Fine-Tuning Language Models from Human Preferences",
    "1910.00177": "Advantage-Weighted Regression: Simple and Scalable Off-Policy Reinforcement Learning",
    "1912.09729": "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning",
    "2102.07954": "AlphaNet: Improved Training of Supernets with Alpha-Divergence",
    "2110.14168": "Training Verifiers to Solve Math Word Problems",
    "2203.02155": "Training language models to follow instructions with human feedback",
    "2204.02311": "PaLM: Scaling Language Modeling with Pathways",
    "2301.11270": "Principled Reinforcement Learning with Human Feedback from Pairwise or K-wise Comparisons",
    "2304.06767": "RAFT: Reward rAnked FineTuning for Generative Foundation Model Alignment",
    "2305.10425": "SLiC-HF: Sequence Likelihood Calibration with Human Feedback",
    "2305.18290": "Direct Preference Optimization: Your Language Model is Secretly a Reward Model",
    "2305.20050": "Let's Verify Step by Step",
    "2306.08543": "MiniLLM: Knowledge Distillation of Large Language Models",
    "2306.13649": "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes",
    "2307.09288": "Llama 2: Open Foundation and Fine-Tuned Chat Models",
    "2307.15190": "f-Divergence Minimization for Sequence-Level Knowledge Distillation",
    "2309.06657": "Statistical Rejection Sampling Improves Preference Optimization",
    "2309.16240": "Beyond Reverse KL: Generalizing Direct Preference Optimization with Diverse Divergence Constraints",
    "2310.10505": "ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method for Aligning Large Language Models",
    "2310.12036": "A General Theoretical Paradigm to Understand Learning from Human Preferences",
    "2312.08935": "Math-Shepherd: Verify and Reinforce LLMs Step-by-step without Human Annotations",
    "2312.09244": "Helping or Herding? Reward Model Ensembles Mitigate but do not Eliminate Reward Hacking",
    "2401.08417": "Contrastive Preference Optimization: Pushing the Boundaries of LLM Performance in Machine Translation",
    "2402.00856": "Towards Efficient Exact Optimization of Language Model Alignment",
    "2402.01306": "KTO: Model Alignment as Prospect Theoretic Optimization",
    "2401.13586": "Instruction Fine-Tuning: Does Prompt Loss Matter?",
    "2402.03300": "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models",
    "2402.03898": "DistiLLM: Towards Streamlined Distillation for Large Language Models",
    "2402.05369": "Noise Contrastive Alignment of Language Models with Explicit Rewards",
    "2402.13228": "Smaug: Fixing Failure Modes of Preference Optimisation with DPO-Positive",
    "2402.14740": "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs",
    "2403.00409": "Provably Robust DPO: Aligning Language Models with Noisy Feedback",
    "2403.07691": "ORPO: Monolithic Preference Optimization without Reference Model",
    "2404.04656": "Binary Classifier Optimization for Large Language Model Alignment",
    "2404.19733": "Iterative Reasoning Preference Optimization",
    "2405.00675": "Self-Play Preference Optimization for Language Model Alignment",
    "2405.14734": "SimPO: Simple Preference Optimization with a Reference-Free Reward",
    "2406.05882": "Distributional Preference Alignment of LLMs via Optimal Transport",
    "2406.08414": "Discovering Preference Optimization Algorithms with and for Large Language Models",
    "2406.11827": "WPO: Enhancing RLHF with Weighted Preference Optimization",
    "2408.06266": "Anchored Preference Optimization and Contrastive Revisions: Addressing Underspecification in Alignment",
    "2409.06411": "Length Desensitization in Direct Preference Optimization",
    "2411.15124": "Tulu 3: Pushing Frontiers in Open Language Model Post-Training",
    "2501.03262": "REINFORCE++: A Simple and Efficient Approach for Aligning Large Language Models",
    "2501.03884": "AlphaPO: Reward Shape Matters for LLM Alignment",
    "2501.12599": "Kimi k1.5: Scaling Reinforcement Learning with LLMs",
    "2502.03373": "Demystifying Long Chain-of-Thought Reasoning in LLMs",
    "2503.04697": "L1: Controlling How Long A Reasoning Model Thinks With Reinforcement Learning",
    "2503.14476": "DAPO: An Open-Source LLM Reinforcement Learning System at Scale",
    "2503.16870": "Sparse Logit Sampling: Accelerating Knowledge Distillation in LLMs",
    "2503.20783": "Understanding R1-Zero-Like Training: A Critical Perspective",
    "2504.02546": "GPG: A Simple and Strong Reinforcement Learning Baseline for Model Reasoning",
    "2504.11343": "A Minimalist Approach to LLM Reasoning: from Rejection Sampling to Reinforce",
    "2504.10637": "Better Estimation of the KL Divergence Between Language Models",
    "2505.10978": "Group-in-Group Policy Optimization for LLM Agent Training",
    "2505.15201": "Pass@K Policy Optimization: Solving Harder Reinforcement Learning Problems",
    "2505.22312": "Skywork Open Reasoner 1 Technical Report",
    "2505.22617": "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models",
    "2505.23585": "On-Policy RL with Optimal Reward Baseline",
    "2506.01939": "Beyond the 80/20 Rule: High-Entropy Minority Tokens Drive Effective Reinforcement Learning for LLM Reasoning",
    "2506.13585": "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention",
    "2506.14758": "Reasoning with Exploration: An Entropy Perspective",
    "2507.18071": "Group Sequence Policy Optimization",
    "2507.20673": "Geometric-Mean Policy Optimization",
    "2508.05629": "On the Generalization of SFT: A Reinforcement Learning Perspective with Reward Rectification",
    "2508.08221": "Part I: Tricks or Traps? A Deep Dive into RL for LLM Reasoning",
    "2508.10751": "Pass@k Training for Adaptively Balancing Exploration and Exploitation of Large Reasoning Models",
    "2510.13786": "The Art of Scaling Reinforcement Learning Compute for LLMs",
    "2510.18855": "Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model",
    "2511.20347": "Soft Adaptive Policy Optimization",
    "2512.02556": "DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models",
    "2601.05242": "GDPO: Group reward-Decoupled Normalization Policy Optimization for Multi-reward RL Optimization",
    "2602.02710": "Maximum Likelihood Reinforcement Learning",
    "2602.04879": "Rethinking the Trust Region in LLM Reinforcement Learning",
}
OTHERS = {
    "TRL 1.16.0": Paper("TRL: Transformers Reinforcement Learning", "https://github.com/huggingface/trl"),
    "verl 0.9.1": Paper("verl: Volcano Engine Reinforcement Learning for LLMs", "https://github.com/volcengine/verl"),
    "OpenRLHF 0.11.2": Paper("OpenRLHF", "https://github.com/OpenRLHF/OpenRLHF"),
    "Tunix 0.1.7": Paper("Tunix: a JAX-native library for LLM post-training", "https://github.com/google/tunix"),
    "SkyRL 0.4.0": Paper("SkyRL", "https://github.com/NovaSky-AI/SkyRL"),
    "rlax 0.1.9": Paper("RLax", "https://github.com/google-deepmind/rlax"),
    "optax 0.2.8": Paper("Optax", "https://github.com/google-deepmind/optax"),
    "Mitchell 2023": Paper(
        "A note on DPO with noisy preferences and relationship to IPO", "https://ericmitchell.ai/cdpo.pdf"
    ),
    "Williams 1992": Paper(
        "Simple statistical gradient-following algorithms for connectionist reinforcement learning",
        "https://doi.org/10.1007/BF00992696",
    ),
    "fengyao.notion.site/off-policy-rl": Paper(
        "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", "https://fengyao.notion.site/off-policy-rl"
    ),
    "richardli.xyz/rl-collapse": Paper(
        "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch",
        "https://richardli.xyz/rl-collapse",
    ),
    "Kool, van Hoof, Welling 2019": Paper(
        "Buy 4 REINFORCE Samples, Get a Baseline for Free!", "https://openreview.net/forum?id=r1lgTGL5DE"
    ),
    "Altman 1999": Paper("Constrained Markov Decision Processes", "https://doi.org/10.1201/9781315140223"),
    "Bengio et al. 2003": Paper(
        "A Neural Probabilistic Language Model",
        "https://www.jmlr.org/papers/v3/bengio03a.html",
    ),
    "Bradley & Terry 1952": Paper(
        "Rank Analysis of Incomplete Block Designs: I. The Method of Paired Comparisons",
        "https://doi.org/10.2307/2334029",
    ),
    "Lu & Thinking Machines Lab 2025": Paper(
        "On-Policy Distillation",
        "https://thinkingmachines.ai/blog/on-policy-distillation/",
    ),
    "Minka 2005": Paper(
        "Divergence measures and message passing",
        "https://www.microsoft.com/en-us/research/publication/divergence-measures-and-message-passing/",
    ),
    "Plackett 1975": Paper("The Analysis of Permutations", "https://doi.org/10.2307/2346567"),
}
PAPERS = {**{key: Paper(title, f"https://arxiv.org/abs/{key}") for key, title in ARXIV.items()}, **OTHERS}


def papers_of(citation: str) -> list[Paper]:
    """The papers that the text names, in its order."""
    found = sorted((citation.index(key), key) for key in PAPERS if key in citation)
    return [PAPERS[key] for _, key in found]
